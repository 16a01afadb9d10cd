<schema name="trip">
  <system>
    You plan trips. Use these notes.
    <module name="traveller">
      The traveller is called
      <param name="name" len="6" default="Maria"/>
      and stays for
      <param name="days" len="4" default="three"/>
      days. Walks are planned for the morning and rooms are booked before the journey begins.
    </module>
    <union default="lisbon">
      <module name="lisbon">
        Lisbon lies on hills above a wide river. Trams climb where walking is hard, and the old town is best early. The price of Marble Gate is 48. The price of River Station is 12.
        <union default="lisbon-museums">
          <module name="lisbon-museums">
            The museum of tiles has a quiet court, and the ships are shown by the water. The room of Saffron Point is 215.
          </module>
          <module name="lisbon-food">
            Fish is grilled in the lanes behind the castle, and the bakeries open before sunrise. The room of Pepper One is 371.
          </module>
        </union>
      </module>
      <module name="oslo">
        Oslo lies at the end of a long fjord. Ferries go to the islands all day, and the forest begins where the metro ends. The price of Glacier Tower is 93. The price of Forest Station is 27.
        <union default="oslo-museums">
          <module name="oslo-museums">
            The museum of ships stands by the water, and the painters have a house of their own. The room of Kestrel Point is 608.
          </module>
          <module name="oslo-food">
            Soup is sold at the market from noon, and the bread is dark. The room of Hazel One is 142.
          </module>
        </union>
      </module>
    </union>
    <module name="budget">
      Only what is cheap is suggested. The code of Copper Three is 7714.
    </module>
  </system>
</schema>
